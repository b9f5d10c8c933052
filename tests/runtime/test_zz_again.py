import pytest, time
from tests.runtime import test_kill_rounds as t
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("i", range(3))
def test_again(tmp_path, i):
    a=time.time()
    try: t._round(tmp_path, "stop", 923886)
    finally: print("took", time.time()-a)
