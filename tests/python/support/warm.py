"""A Python that starts in a tenth of a second, with torch and ampfuse imported.

Importing takes 3 seconds, and most tests of command lines are not about it. A server in a process
of its own imports once. `python()` is the path of a program that asks the server to fork a child.
The child becomes the program that an interpreter would run: it has the arguments, folder,
environment, standard streams, `__main__` and `sys.path`, and ends like one. In it, `sys.executable`
is the same program. What differs: modules are already imported, and libraries have read environment
variables before. Tests that depend on this start `sys.executable`.
"""

import atexit
import ctypes
import json
import linecache
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from types import ModuleType

import torch
from torch._inductor.cpu_vec_isa import VecISA

# torch's compiler tries each instruction set with a program that imports torch, in 15 seconds. The
# environment variable TORCHINDUCTOR_VEC_ISA_OK prevents only some of these trials. Neither the
# process of the tests nor warm ones make them.
VecISA.check_build = lambda *_: True

MOST = 2**20  # bytes of a request
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
# Variables that are read when a process starts or a library is loaded. If one differs, the program
# runs in a new interpreter. The child obeys OMP_NUM_THREADS and MALLOC_MMAP_THRESHOLD_ itself.
READ_EARLY = ("PYTHON", "LD_", "OMP_W", "KMP_", "GLIBC", "ATEN_", "TORCH_LOGS")
LAUNCHER = """#!{python} -IS
import json, os, signal, socket, sys

words, env = sys.argv[1:], dict(os.environ)
early = {{name: value for name, value in env.items() if name.startswith({early})}}
is_plain = words and (words[0] in ("-c", "-m", "-u") or words[0][0] != "-")
if early != {environment} or not is_plain:
    os.execv({python!r}, [{python!r}, *words])
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, {most})
server.connect("\\0{name}")
request = {{"arguments": words, "cwd": os.getcwd(), "env": env}}
socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
child = int(server.recv(64))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(child, number))
status = int(server.recv(64))
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""
_cold_run = subprocess.run
_python: str | None = None


def python() -> str:
    """Return the path of the program, for which this process has a server."""
    global _python
    if _python is None:
        _python = _start_server()
    return _python


def run(command, **options):
    """Do what subprocess.run does, in a warm process if the command starts Python."""
    if command[0] == sys.executable:
        command = [python(), *command[1:]]
    return _cold_run(command, **options)


def _early(environment):
    return {name: value for name, value in environment.items() if name.startswith(READ_EARLY)}


def _start_server():
    folder = tempfile.mkdtemp()
    owner = os.getpid()
    launcher = Path(folder) / "python"
    text = LAUNCHER.format(
        python=sys.executable,
        name=launcher,
        early=READ_EARLY,
        environment=_early(os.environ),
        most=MOST,
    )
    launcher.write_text(text)
    launcher.chmod(0o755)
    reader, writer = os.pipe()  # the server ends when this process does, which closes the pipe
    server = subprocess.Popen(
        [sys.executable, __file__, str(launcher), str(reader)],
        pass_fds=[reader],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    os.close(reader)
    server.stdout.readline()  # it listens

    def end():
        if os.getpid() != owner:  # with Python 3.13, processes of multiprocessing call this, too
            return
        os.close(writer)
        server.wait()
        shutil.rmtree(folder)

    atexit.register(end)
    return str(launcher)


# --- the server -------------------------------------------------------------------------------


def serve(name, pipe):
    """Fork a child for each request, and report its exit code. Return in each child its request."""
    import gc

    import ampfuse.tools.command.advise
    import ampfuse.tools.command.compare
    import ampfuse.tools.command.memory
    import ampfuse.tools.precision.trial  # noqa: F401
    import torch._dynamo
    import torch.distributed.launcher.api
    import torch.utils.data  # noqa: F401

    gc.freeze()  # or a child's first collection would copy all pages
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{name}")
    listener.listen()
    ready = selectors.DefaultSelector()
    ready.register(pipe, selectors.EVENT_READ)
    ready.register(listener, selectors.EVENT_READ)
    children = {}  # the connections by which they were requested, by the processes' descriptors
    print("listens", flush=True)
    while True:
        for key, _ in ready.select():
            if key.fd == pipe:
                os._exit(0)
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                message, files, _, _ = socket.recv_fds(connection, MOST, 3)
                child = os.fork()
                if child == 0:
                    os.close(pipe)
                    for opened in (listener, ready, connection, *children.values()):
                        opened.close()
                    return json.loads(message), files
                for file in files:
                    os.close(file)
                connection.send(str(child).encode())
                descriptor = os.pidfd_open(child)
                children[descriptor] = connection
                ready.register(descriptor, selectors.EVENT_READ, child)
                ready.register(connection, selectors.EVENT_READ, child)
            elif key.fd in children:  # a child has ended
                _, status = os.waitpid(key.data, 0)
                ready.unregister(key.fd)
                os.close(key.fd)
                with children.pop(key.fd) as connection:
                    if connection in ready.get_map():
                        ready.unregister(connection)
                        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            else:  # who requested this child has ended
                ready.unregister(key.fileobj)
                os.kill(key.data, signal.SIGKILL)


def become(name, request, files):
    """Give this process all that the program would have; return a function that runs it."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    arguments = request["arguments"]
    sys.executable = name
    sys.orig_argv = [name, *arguments]
    if arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        arguments = arguments[1:]
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        ctypes.CDLL(None).mallopt(-3, int(os.environ["MALLOC_MMAP_THRESHOLD_"]))
    main = ModuleType("__main__")
    vars(main).update({"__builtins__": __builtins__, "__annotations__": {}})
    sys.modules["__main__"] = main
    if arguments[0] == "-m":
        import runpy

        sys.argv, sys.path[0] = ["-m", *arguments[2:]], os.getcwd()
        return lambda: runpy._run_module_as_main(arguments[1])
    if arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        source, file = arguments[1], "<string>"
        if sys.version_info >= (3, 13):  # it shows the lines in tracebacks
            lines = [f"{line}\n" for line in source.splitlines()]
            linecache.cache[file] = (len(source), None, lines, file)
    else:
        file = os.path.abspath(arguments[0])
        sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.realpath(file))
        vars(main).update({"__file__": file, "__cached__": None})
        source = Path(file).read_bytes()
    return lambda: exec(compile(source, file, "exec", dont_inherit=True), vars(main))


def end_after(program):
    """Run the program, and end the process as an interpreter does, but without freeing memory."""
    code = 0
    try:
        program()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        code = 1
    try:
        threading._shutdown()  # waits for threads
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    end_after(become(sys.argv[1], *serve(sys.argv[1], int(sys.argv[2]))))
