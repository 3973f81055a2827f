"""Learn scikit-learn's handwritten digits, to draw them and to read them: ``custom_imports`` of ``unified_digits``."""

from unigen_ds.examples.digits.dataset import DigitsDataset as DigitsDataset
from unigen_ds.examples.digits.report_hook import DigitsReportHook as DigitsReportHook
