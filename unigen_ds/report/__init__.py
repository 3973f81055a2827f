"""One HTML file about one run or several: ``write_report``. Reads what the run wrote; changes nothing."""

from unigen_ds.report.page import write_report as write_report
