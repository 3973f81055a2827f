"""Learn scikit-learn's handwritten digits, to draw them and to read them: ``custom_imports`` of ``unified_digits``.

``dataset.py`` writes and reads the digits, ``report_hook.py`` measures a model on them at the end of a run. Importing
this package registers ``DigitsDataset`` and ``DigitsReportHook``.
"""

from unigen_ds.examples.digits.dataset import DigitsDataset as DigitsDataset
from unigen_ds.examples.digits.report_hook import DigitsReportHook as DigitsReportHook
