"""Generated models: one folder each, committed, never edited. `make regen MODEL=<model>` writes them."""
