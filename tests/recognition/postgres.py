"""A real PostgreSQL server for the tests, in a temporary directory and on a socket there."""

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import quote

SETTINGS = "-c listen_addresses='' -c fsync=off -c shared_buffers=32MB -c max_connections=60 -c lc_messages=C"


class CannotStart(Exception):
    """There is no server to be had on this machine, and why."""


class Server:
    """Started when made; it refuses to run as root, so it runs as somebody else then."""

    def __init__(self) -> None:
        try:
            import psycopg
        except ImportError:
            raise CannotStart("psycopg is not installed") from None
        self._psycopg, self._programs = psycopg, _programs()
        self._user = _user()
        self._folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # a socket's path must be short
        self._numbers = itertools.count()
        try:
            if self._user is not None:
                shutil.chown(self._folder, self._user)
            self._run("initdb", "--auth=trust", "--username=tester", "--encoding=UTF8", "--no-locale", "--no-sync")
            settings = f"--options={SETTINGS} -k {self._folder}"
            self._run("pg_ctl", "--wait", f"--log={self._folder}/log", settings, "start")
        except subprocess.CalledProcessError as error:
            shutil.rmtree(self._folder)
            raise CannotStart(f"{error.cmd[0]}: {error.stdout}{error.stderr}") from None

    def stop(self) -> None:
        self._run("pg_ctl", "--mode=immediate", "stop")
        shutil.rmtree(self._folder)

    def new_database(self) -> str:
        """The URL of a place of its own; a schema, because making a database takes longer."""
        schema = f"gallery{next(self._numbers)}"
        with self._psycopg.connect(f"host={self._folder} user=tester dbname=postgres", autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {schema}".encode())
        return f"postgresql://tester@/postgres?host={quote(str(self._folder))}&options=-csearch_path%3D{schema}"

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), "-D", str(self._folder / "data"), *arguments]
        group = None if self._user is None else pwd.getpwnam(self._user).pw_gid
        extra = None if self._user is None else []
        with tempfile.TemporaryFile("w+") as said:  # not a pipe: the server would hold it open
            done = subprocess.run(
                command, user=self._user, group=group, extra_groups=extra, cwd=self._folder, stdout=said, stderr=said
            )
            said.seek(0)
            if done.returncode:
                raise subprocess.CalledProcessError(done.returncode, command, said.read(), "")


def _programs() -> Path:
    found = shutil.which("initdb")
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: path.parent.name)
    if found is None and not folders:
        raise CannotStart("PostgreSQL is not installed (no initdb)")
    return Path(found).resolve().parent if found else folders[-1]


def _user() -> str | None:
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()} & {"postgres", "nobody"}
    if not names:
        raise CannotStart("PostgreSQL does not run as root, and there is no user postgres or nobody")
    return max(names)  # postgres, where there is one
