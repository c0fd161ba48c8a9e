"""What tests share: models, ranks, graphs, loops, the reference."""
