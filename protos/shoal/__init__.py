"""The contract of the mesh (one sub-package per service) and a thin client that needs only grpcio and protobuf.

    async with shoal.Client("localhost:50051") as client:
        async for piece in client.chat("What is the capital of Japan?"):
            print(piece.text, end="")

Where no event loop runs, SyncClient does the same.
"""

from shoal.answer import (
    Answer,
    Choice,
    Message,
    Model,
    Piece,
    Started,
    Summary,
    TokenCount,
    TokenLogprob,
    Tool,
    ToolCall,
    Usage,
)
from shoal.channel import ClientTls
from shoal.client import Client, Stream
from shoal.failure import InvalidRequest, NotAllowed, Overloaded, ShoalClientError, TimedOut, Unavailable
from shoal.sync_client import SyncClient, SyncStream

__all__ = [
    "Answer",
    "Choice",
    "Client",
    "ClientTls",
    "InvalidRequest",
    "Message",
    "Model",
    "NotAllowed",
    "Overloaded",
    "Piece",
    "ShoalClientError",
    "Started",
    "Stream",
    "Summary",
    "SyncClient",
    "SyncStream",
    "TimedOut",
    "TokenCount",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "Unavailable",
    "Usage",
]
