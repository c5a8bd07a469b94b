"""What the commands do. `cli.py` says what there is; each module here is imported only when its command is called."""
