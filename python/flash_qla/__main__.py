"""`python -m flash_qla`: info, check, bench, demo."""

try:
    from .cli import app
except ModuleNotFoundError as error:
    if error.name not in ("typer", "rich"):
        raise
    raise SystemExit(f"python -m flash_qla: {error.name} must be installed (it was not found): "
                     "pip install 'flash-qla-native[cli]'")

app(prog_name="python -m flash_qla")
