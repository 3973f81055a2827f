"""An imitation of the package lmms-eval: the parts of its interface that are used, with one task of two records."""
