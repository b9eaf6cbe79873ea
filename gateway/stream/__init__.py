"""From token ids to the text a client may see: whole characters, and nothing of a stop string."""

from gateway.stream.choice_text import ChoiceText, Piece
from gateway.stream.markers import Markers, Watcher

__all__ = ["ChoiceText", "Markers", "Piece", "Watcher"]
