"""A stand-in for mamba-ssm on the CPU: its signatures, upstream's torch forms for one document at a time."""
