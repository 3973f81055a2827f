"""``tools/checkpoints.py``: what a researcher looks at before a resume."""

from __future__ import annotations

from tests.checkpoint.support import flip_byte, save_chain
from tools.checkpoints import main
from unigen_ds.checkpoint import listing, store
from unigen_ds.checkpoint.manifest import FILE_NAME


def lines(capsys) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_list(tmp_path, capsys):
    save_chain(tmp_path, 12, 24, 36, 48)
    lineage = store.continued_lineage(tmp_path, tmp_path / "iter_36.pth", store.list_checkpoints(tmp_path))
    store.continue_from(tmp_path, tmp_path / "iter_36.pth", lineage)
    (tmp_path / "iter_24.pth" / "model.safetensors").unlink()
    (tmp_path / "iter_12.pth" / FILE_NAME).write_text("{")
    assert main(["list", str(tmp_path)]) == 0
    heading, *rows = lines(capsys)
    assert heading.split("  ")[0] == "name" and all(name in heading for name in listing.TABLE_COLUMNS)
    assert [row.split()[0] for row in rows] == ["iter_12.pth", "iter_24.pth", "iter_36.pth", "iter_48.pth"]
    assert "manifest.json is damaged" in rows[0]
    assert rows[1].endswith("model.safetensors is missing")
    assert rows[2].endswith(listing.NEXT) and rows[3].endswith(listing.VOID)
    cells = [cell.strip() for cell in rows[2].split("  ") if cell.strip()]
    assert cells[:5] == ["iter_36.pth", "12", "12", "2.40", "12"] or cells[1:5] == ["36", "12", "2.40", "12"]
    assert "KiB" in cells[5] and cells[7] == "iter_24.pth"


def test_verify_reads_every_byte(tmp_path, capsys):
    paths = save_chain(tmp_path, 12, 24)
    assert main(["verify", str(tmp_path)]) == 0
    assert lines(capsys) == [f"{path.name}  complete, every hash agrees" for path in paths]
    flip_byte(paths[0] / "optimizer.safetensors")
    assert main(["list", str(tmp_path)]) == 0  # sizes tell nothing
    assert "hash" not in capsys.readouterr().out
    assert main(["verify", str(tmp_path)]) == 1
    bad, good = lines(capsys)
    assert "optimizer.safetensors has changed since it was written" in bad and "every hash agrees" in good
    assert main(["verify", str(paths[1])]) == 0
    assert main(["verify", str(paths[0])]) == 1


def test_show_takes_the_newest_of_a_work_dir_or_the_one_named(tmp_path, capsys):
    paths = save_chain(tmp_path, 24, 12)
    assert main(["show", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    lines_of_text = (
        str(paths[1]), "as commit 2, after iter_24.pth", "4 per device x 1 process(es) x 3 accumulated = 12", "seed 7",
        "epoch 0, row 2, sequences 48, window 1", "default 0.1", "28 in 2 tensors: group default 28", "ema/rank00000",
    )  # fmt: skip
    assert [line for line in lines_of_text if line not in text] == []
    assert main(["show", str(paths[0])]) == 0
    assert "as commit 1, after a fresh start" in capsys.readouterr().out
