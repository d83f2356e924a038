"""`python -m qconvert`."""

from qconvert.convert.cli import main

if __name__ == "__main__":
    main()
