"""One HTML file about one run or several: ``write_report``. Reads what the run wrote; changes nothing.

``reading.py`` and ``results.py`` read, ``goodput.py``, ``charts.py``, ``panels.py`` and ``page.py`` compute,
``templates/`` has the markup.
"""

from unigen_ds.report.page import write_report as write_report
