"""pytest plugin: server flags of the tests' servers on two GPUs, from MORE_SERVER_FLAGS."""

import os
import sys

sys.path.insert(0, os.path.join(os.getcwd(), "tests"))
import served  # noqa: E402

served.BASE_FLAGS += os.environ.get("MORE_SERVER_FLAGS", "").split()
