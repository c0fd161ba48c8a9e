"""The papers' own experiments beside what the cost model predicts for them."""
