"""The abstract methods and the attributes of lmms-eval's class ``lmms``."""

import abc


class lmms(abc.ABC):
    is_simple = True

    def __init__(self) -> None:
        self._rank = 0
        self._world_size = 1
        self.task_dict: dict = {}

    @abc.abstractmethod
    def loglikelihood(self, requests): ...

    @abc.abstractmethod
    def generate_until(self, requests): ...

    @abc.abstractmethod
    def generate_until_multi_round(self, requests): ...

    @property
    def rank(self):
        return self._rank

    @property
    def world_size(self):
        return self._world_size
