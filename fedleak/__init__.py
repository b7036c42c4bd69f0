"""What can a federated-learning server read out of the updates that its clients send?"""

import logging

__version__ = "0.1.0"

# What is noted is shown by whoever wants it, by nobody else.
logging.getLogger(__name__).addHandler(logging.NullHandler())
