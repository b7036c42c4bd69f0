"""What can a federated-learning server read out of the updates that its clients send?"""

__version__ = "0.1.0"
