"""One HTML file about one run or several: ``write_report``. ``reading.py`` reads what the run wrote and changes
nothing, ``charts.py`` and ``page.py`` compute, ``templates/`` has the markup. ``data_page.py``: about training data."""

from unigen_ds.report.page import write_report as write_report
