"""One HTML file about one run or several: ``write_report``. Reads what the run wrote; changes nothing.

``reading.py`` reads, ``charts.py`` and ``page.py`` compute, ``templates/`` has the markup.
``data_page.py`` is the page about training data.
"""

from unigen_ds.report.page import write_report as write_report
