"""`python -m dapo` is `dapo`."""

from dapo.cli.main import main

if __name__ == "__main__":
    main()
