"""From a batch to a plan: what is read of each table, what ranks report of it, where parameters are placed."""
