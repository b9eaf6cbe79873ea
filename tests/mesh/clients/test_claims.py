"""An attempt is parked only when every attached replica, asked in the present epoch, leaves it unclaimed."""

from mesh.clients.claims import Claims

A, B = ("a", 1), ("b", 2)


def two_replicas() -> Claims:
    claims = Claims()
    claims.attach("s1")
    claims.attach("s2")
    return claims


def test_one_replicas_vote_is_enough_where_it_is_alone() -> None:
    claims = Claims()
    claims.attach("s1")
    assert claims.hear("s1", claims.epoch, [A]) == {A}


def test_all_attached_replicas_must_agree() -> None:
    claims = two_replicas()
    assert claims.hear("s1", claims.epoch, [A, B]) == frozenset()
    assert claims.hear("s2", claims.epoch, [B]) == {B}


def test_a_later_set_takes_a_vote_back() -> None:
    claims = two_replicas()
    claims.hear("s1", claims.epoch, [A])
    claims.hear("s1", claims.epoch, [])
    assert claims.hear("s2", claims.epoch, [A]) == frozenset()


def test_a_vote_of_an_older_epoch_counts_for_nothing() -> None:
    claims = two_replicas()
    old = claims.epoch
    claims.hear("s1", old, [A])
    claims.attach("s3")
    assert claims.epoch == old + 1
    assert claims.hear("s2", old, [A]) == frozenset()
    for replica in ("s2", "s3"):
        assert claims.hear(replica, claims.epoch, [A]) == frozenset()
    assert claims.hear("s1", claims.epoch, [A]) == {A}


def test_losing_a_replica_starts_the_question_anew() -> None:
    claims = two_replicas()
    claims.hear("s1", claims.epoch, [A])
    claims.detach("s2")
    assert claims.hear("s1", claims.epoch - 1, [A]) == frozenset()
    assert claims.hear("s1", claims.epoch, [A]) == {A}


def test_a_replica_that_came_back_knows_nothing_yet() -> None:
    claims = two_replicas()
    before = claims.epoch
    claims.attach("s1")
    assert claims.epoch == before + 1
    assert claims.attached == {"s1", "s2"}


def test_a_stranger_has_no_vote_and_its_leaving_changes_nothing() -> None:
    claims = two_replicas()
    before = claims.epoch
    assert claims.hear("s9", before, [A]) == frozenset()
    claims.detach("s9")
    assert claims.epoch == before
