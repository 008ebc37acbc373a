"""The parts of the documentation site that come from the code, made while mkdocs builds it.

- ``hooks``: what mkdocs calls; fills in ``<!-- generated: NAME -->`` and adds figures and files of the repository.
- ``configuration``: the tables of broker.yaml and producer.yaml, from their JSON schema.
- ``cli``: the commands and their options, from the command line itself.
- ``api_index``: the table of public names. mkdocstrings makes the pages behind it from docstrings.
- ``examples``: shows the examples in docstrings as code.
- ``errors``: the tree of errors, from ``streampack.errors``.
- ``messages``: the tables of messages and of records of the log, from their classes.
- ``sample_warnings``: the table of warnings about samples.
- ``figures``: diagrams as SVG, computed by ``streampack.pack_lengths`` or drawn from the tables of results.
- ``row_keys``: the table of the keys of rows that streampack knows.
- ``dashboard``: the Grafana dashboard in ``deploy/``, from the declared figures. It is not a part of the site.
- ``notebooks``: the page of the quickstart, from its notebook.
- ``search_words``: the order of search results, and words that users type for a page.
- ``repository``: links from pages to files of the repository outside ``docs/``.
"""
