"""Accounts agree with the memory that torch allocates when the same step really runs."""

import pytest
from account_error import MODELS, SETTINGS, compare


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_account_is_within_5_percent_of_the_measured_peak(make, setting):
    account, measured = compare(make, setting)
    assert account == pytest.approx(measured, rel=0.05)
