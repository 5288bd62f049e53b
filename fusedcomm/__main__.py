"""`python -m fusedcomm` is the command `fusedcomm`."""

from fusedcomm.cli import main

if __name__ == "__main__":
    main()
