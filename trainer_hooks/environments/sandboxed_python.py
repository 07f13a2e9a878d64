"""Runs a program from standard input in a sandbox: python -I sandboxed_python.py SETTINGS.

PythonTool starts this file by its path, so it imports only the standard library. SETTINGS is a JSON
object with the limits, "directory" and "required", the protections without which no program is run.
If standard input is empty, this file prints the protections that the kernel gives.

The first process creates namespaces and waits. The second process runs the program as process 1 of
a process namespace. When it ends, the kernel kills every process that the program started.

Sources: Linux manual pages user_namespaces(7), pid_namespaces(7), landlock(7), seccomp(2).
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import resource
import signal
import struct
import sys
from typing import Any

# With "network" a program has no sockets. With "processes" it cannot start, signal or trace a
# process. With "files" it reads only Python, its packages and system libraries, and writes only its
# own directory. With "disk" this directory is a file system of limited size.
PROTECTIONS = ("network", "processes", "files", "disk")

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 38, 22
_NEW_NAMESPACES = 0x10000000 | 0x20000 | 0x8000000 | 0x40000000 | 0x20000000  # user to process ids
_MS_NOSUID, _MS_NODEV = 2, 4
_CLONE_THREAD = 0x10000
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
# The number of low bits for the access rights that each version of Landlock controls.
_LANDLOCK_BITS = {1: 13, 2: 14, 3: 15, 4: 15}
_LANDLOCK_NEWEST_BITS = 16
# Only Python and shared libraries can be read.
_READABLE = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_TMPFS_FILES = 1024

# Numbers of system calls on x86-64 and on ARM 64. None means that there is no such call.
_FORBIDDEN: dict[str, tuple[int | None, int | None]] = {
    **dict(fork=(57, None), vfork=(58, None), execve=(59, 221), execveat=(322, 281)),
    **dict(socket=(41, 198), connect=(42, 203), bind=(49, 200), io_uring_setup=(425, 425)),
    **dict(tkill=(200, 130), rt_sigqueueinfo=(129, 138), rt_tgsigqueueinfo=(297, 240)),
    **dict(pidfd_open=(434, 434), pidfd_send_signal=(424, 424), pidfd_getfd=(438, 438)),
    **dict(setsid=(112, 157), setpgid=(109, 154), ptrace=(101, 117)),
    **dict(process_vm_readv=(310, 270), process_vm_writev=(311, 271)),
    **dict(unshare=(272, 97), setns=(308, 268), chroot=(161, 51), pivot_root=(155, 41)),
    **dict(mount=(165, 40), umount2=(166, 39), open_tree=(428, 428), move_mount=(429, 429)),
    **dict(fsopen=(430, 430), fsconfig=(431, 431), fsmount=(432, 432), mount_setattr=(442, 442)),
    **dict(bpf=(321, 280), perf_event_open=(298, 241), userfaultfd=(323, 282)),
    **dict(add_key=(248, 217), request_key=(249, 218), keyctl=(250, 219)),
    **dict(shmget=(29, 194), semget=(64, 190), msgget=(68, 186), mq_open=(240, 180)),
    **dict(memfd_create=(319, 279), open_by_handle_at=(304, 265), setrlimit=(160, 164)),
    **dict(setpriority=(141, 140), sched_setparam=(142, 118), sched_setscheduler=(144, 119)),
    **dict(sched_setattr=(314, 274), ioprio_set=(251, 30), setuid=(105, 146), setgid=(106, 144)),
    # Landlock does not protect the modes, owners, times and attributes of files.
    **dict(chmod=(90, None), fchmod=(91, 52), fchmodat=(268, 53), fchmodat2=(452, 452)),
    **dict(chown=(92, None), fchown=(93, 55), lchown=(94, None), fchownat=(260, 54)),
    **dict(utime=(132, None), utimes=(235, None), utimensat=(280, 88), futimesat=(261, None)),
    **dict(setxattr=(188, 5), lsetxattr=(189, 6), fsetxattr=(190, 7), setxattrat=(463, 463)),
    **dict(removexattr=(197, 14), lremovexattr=(198, 15), fremovexattr=(199, 16)),
    **dict(removexattrat=(466, 466), file_setattr=(469, 469)),
    # Only root can make these calls, but the trainer can run as root.
    **dict(reboot=(169, 142), kexec_load=(246, 104), kexec_file_load=(320, 294)),
    **dict(init_module=(175, 105), finit_module=(313, 273), delete_module=(176, 106)),
    **dict(swapon=(167, 224), swapoff=(168, 225), settimeofday=(164, 170)),
    **dict(clock_settime=(227, 112), clock_adjtime=(305, 266), adjtimex=(159, 171)),
    **dict(sethostname=(170, 161), setdomainname=(171, 162), syslog=(103, 116), acct=(163, 89)),
    **dict(mknod=(133, None), mknodat=(259, 33), quotactl=(179, 60), vhangup=(153, 58)),
}
_CLONE, _CLONE3, _PRLIMIT64 = (56, 220), (435, 435), (302, 261)
_KILL, _TGKILL = (62, 129), (234, 131)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH


def main(arguments: list[str]) -> int:
    """Run the program in a child process. Return its exit status, or 128 plus the number of the
    signal that ended it."""
    settings, program = json.loads(arguments[0]), sys.stdin.buffer.read()
    _die_with_parent()
    signal.alarm(math.ceil(settings["wall_s"]) + 10)  # in case the parent sends no signal
    has_namespaces = _make_namespaces()
    awaited = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    end_of_life, life = os.pipe()
    child = os.fork()
    if not child:
        os.close(life)  # only the parent keeps this end open
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        try:
            _die_with_parent()
            if _is_closed(end_of_life):
                os._exit(1)  # the parent has ended and will not send the signal
            os._exit(_be_program(settings, program, has_namespaces))
        except BaseException as error:
            print(f"not run: {error!r}", flush=True)
        finally:
            os._exit(1)
    os.close(end_of_life)
    if signal.sigwait(awaited) == signal.SIGTERM:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _be_program(settings: dict[str, Any], program: bytes, has_namespaces: bool) -> int:
    """Enter the sandbox and run the program. Return its exit status, or 1 if it is not run."""
    given = _protect(settings, has_namespaces)
    if not program:
        print(json.dumps(given))
        return 0
    if missing := [name for name in settings["required"] if name not in given]:
        print(f"not run: this kernel cannot protect {', '.join(missing)}")
        return 1
    return _execute(program)


def _execute(program: bytes) -> int:
    """Run the program and return its exit status. Prints its exception as the interpreter does."""
    status = 0
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        import traceback  # importing it earlier adds a tenth to each program's start-up time

        own = error.__traceback__  # begins with the call of `exec`
        traceback.print_exception(error.with_traceback(own and own.tb_next))
        status = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the program has closed it
            status = status or 1
    return status


def _protect(settings: dict[str, Any], has_namespaces: bool) -> list[str]:
    """Restrict this process permanently. Return the protections that hold from then on."""
    directory = settings["directory"]
    given = []
    if has_namespaces and _mount_directory(directory, settings["disk_bytes"]):
        given.append("disk")
    os.chdir(directory)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    _limit(settings)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if _restrict_files(directory):
        given.append("files")
    if _forbid_system_calls():
        given += ["network", "processes"]
    elif has_namespaces:
        given.append("network")
    return given


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _is_closed(end_of_pipe: int) -> bool:
    """Return whether all write ends of the pipe are closed. Closes `end_of_pipe`."""
    os.set_blocking(end_of_pipe, False)
    try:
        return os.read(end_of_pipe, 1) == b""
    except BlockingIOError:
        return False
    finally:
        os.close(end_of_pipe)


def _make_namespaces() -> bool:
    """Enter new user, mount, IPC, network and process namespaces. Return False if the kernel
    refuses."""
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(_NEW_NAMESPACES):
        return False
    maps = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
    for name, text in maps.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True


def _mount_directory(directory: str, disk_bytes: int) -> bool:
    options = f"size={disk_bytes},nr_inodes={_TMPFS_FILES},mode=700".encode()
    flags = _MS_NOSUID | _MS_NODEV
    return not _libc.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", flags, options)


def _limit(settings: dict[str, Any]) -> None:
    for name, limit in {
        "RLIMIT_CPU": settings["cpu_s"],
        "RLIMIT_AS": settings["memory_bytes"],
        "RLIMIT_FSIZE": settings["file_bytes"],
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }.items():
        resource.setrlimit(getattr(resource, name), (limit, limit))


def _restrict_files(directory: str) -> bool:
    """By Landlock, allow only reading Python and system libraries, and writing below `directory`.
    Return whether the restriction holds."""
    version = _libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return False
    all_rights = (1 << _LANDLOCK_BITS.get(version, _LANDLOCK_NEWEST_BITS)) - 1
    ruleset = _libc.syscall(_LANDLOCK_CREATE, struct.pack("Q", all_rights), 8, 0)
    if ruleset < 0:
        return False
    readable = {sys.prefix, sys.base_prefix, sys.exec_prefix, *_READABLE}
    rules = {path: _EXECUTE | _READ_FILE | _READ_DIR for path in readable}
    rules |= dict.fromkeys(_DEVICES, _READ_FILE | _WRITE_FILE)
    rules[directory] = all_rights & ~_EXECUTE
    for path, rights in rules.items():
        if not os.path.exists(path):
            continue
        if not os.path.isdir(path):
            rights &= ~_READ_DIR
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights, descriptor)
        failed = _libc.syscall(_LANDLOCK_ADD, ruleset, _LANDLOCK_PATH_BENEATH, rule, 0)
        os.close(descriptor)
        if failed:
            return False
    restricted = not _libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)
    return restricted


# Instructions of classic BPF, as in linux/filter.h.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_X32_CALLS = 0x40000000


def _forbid_system_calls() -> bool:
    """Install a filter under which forbidden system calls fail with EPERM. Return False if the
    kernel or the machine does not support it."""
    if os.uname().machine not in _MACHINES:
        return False
    column, architecture = _MACHINES[os.uname().machine]
    filters = _filter(column, architecture, os.getpid())
    code = b"".join(struct.pack("HBBI", *each) for each in filters)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(filters), ctypes.addressof(buffer))
    return not _libc.prctl(_PR_SET_SECCOMP, 2, program, 0, 0)


def _filter(column: int, architecture: int, pid: int) -> list[tuple[int, int, int, int]]:
    """Return the filter's instructions as (code, jump if true, jump if false, constant)."""
    refuse = (_RETURN, 0, 0, _ERROR | errno.EPERM)
    allow = (_RETURN, 0, 0, _ALLOW)
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32_CALLS),
        refuse,
    ]
    for numbers in _FORBIDDEN.values():
        number = numbers[column]
        if number is not None:
            lines += [(_EQUAL, 0, 1, number), refuse]
    # clone3 fails with ENOSYS. glibc then calls clone, whose flags the filter can read.
    lines += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    lines += [(_EQUAL, 0, 4, _CLONE[column]), (_LOAD, 0, 0, _ARGUMENTS)]
    lines += [(_ANY_BIT, 0, 1, _CLONE_THREAD), allow, refuse]
    for numbers in (_KILL, _TGKILL):  # a process can signal itself
        lines += [(_EQUAL, 0, 4, numbers[column]), (_LOAD, 0, 0, _ARGUMENTS)]
        lines += [(_EQUAL, 0, 1, pid), allow, refuse]
    # prlimit can only read limits: both halves of its third argument must be 0.
    lines += [(_EQUAL, 0, 6, _PRLIMIT64[column]), (_LOAD, 0, 0, _ARGUMENTS + 16)]
    lines += [(_EQUAL, 0, 3, 0), (_LOAD, 0, 0, _ARGUMENTS + 20), (_EQUAL, 0, 1, 0), allow, refuse]
    return [*lines, allow]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
