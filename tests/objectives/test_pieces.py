import torch

from draftlab.objectives.pieces import cut_into_pieces

K, N = 3, 23
MADE = torch.rand(K, N, generator=torch.Generator().manual_seed(0)) > 0.6
JUDGED = torch.arange(N) % 4 == 0


def listed(index, count):
    return list(range(count))[index] if isinstance(index, slice) else index.tolist()


def predictions(chunks):
    return [
        (int(depth), int(token))
        for chunk in chunks
        for piece in chunk.pieces
        for depth, token in zip(piece.depths, piece.tokens, strict=True)
    ]


def test_every_prediction_that_is_made_comes_once_and_no_other():
    expected = [tuple(place) for place in MADE.nonzero().tolist()]
    for num_heads in (1, K):
        for rows in (1, 5, 100):
            chunks = cut_into_pieces(MADE, judged=None, chunk_rows=rows, num_heads=num_heads)
            assert sorted(predictions(chunks)) == expected
            for chunk in chunks:
                tokens = listed(chunk.tokens, N)
                assert len(tokens) <= rows
                for piece in chunk.pieces:
                    assert len(piece.tokens) <= rows
                    places = listed(piece.rows, len(tokens))
                    assert [tokens[place] for place in places] == piece.tokens.tolist()
                    if num_heads > 1:
                        assert (piece.depths == piece.head).all()


def test_spans_find_the_judged_predictions_of_every_depth():
    chunks = cut_into_pieces(MADE, judged=JUDGED, chunk_rows=9, num_heads=1)
    found = []
    for piece in (piece for chunk in chunks for piece in chunk.pieces):
        shown = torch.tensor(listed(piece.judged, len(piece.tokens)), dtype=torch.int64)
        tokens = piece.tokens[shown]
        found += [(depth, int(t)) for depth, span in piece.spans for t in tokens[span]]
    assert sorted(found) == [tuple(place) for place in (MADE & JUDGED).nonzero().tolist()]


def test_depths_of_one_head_share_pieces_and_full_rows_are_not_copied():
    few = torch.zeros(K, N, dtype=torch.bool)
    few[:, 3:7] = True
    (chunk,) = cut_into_pieces(few, judged=None, chunk_rows=12, num_heads=1)
    assert chunk.tokens == slice(3, 7)
    (piece,) = chunk.pieces
    assert piece.spans == [(0, slice(0, 4)), (1, slice(4, 8)), (2, slice(8, 12))]
    full = cut_into_pieces(few, judged=None, chunk_rows=4, num_heads=1)
    assert [piece.rows for chunk in full for piece in chunk.pieces] == [slice(0, 4)] * K


def test_nothing_made_gives_nothing_to_do():
    none = torch.zeros(K, N, dtype=torch.bool)
    assert cut_into_pieces(none, judged=JUDGED, chunk_rows=4, num_heads=K) == []
    assert cut_into_pieces(none[:, :0], judged=None, chunk_rows=4, num_heads=1) == []
