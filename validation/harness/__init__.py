"""One run = one JSON record: written once, classified, aggregated into claims, rendered into docs.

Independent of the package under test: nothing here imports it.
"""
