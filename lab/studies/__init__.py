"""Studies behind the documents, one a module: `python -m lab.studies.NAME`."""
