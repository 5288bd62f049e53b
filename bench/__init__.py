"""Benchmarks that anyone can run: `fusedcomm bench OP`, on links of a given rate between processes of one machine."""
