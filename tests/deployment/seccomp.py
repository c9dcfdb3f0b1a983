"""A seccomp filter that forbids at least the system calls that Docker's default profile forbids."""

import ctypes
import ctypes.util
import errno

# Calls that versions of the default profile allow to no process, or only to processes with capabilities:
# https://docs.docker.com/engine/security/seccomp/
_FORBIDDEN = """
acct add_key bpf chroot clock_adjtime clock_settime clone3 create_module delete_module fanotify_init
finit_module fsconfig fsmount fsopen fspick get_kernel_syms get_mempolicy init_module io_uring_enter
io_uring_register io_uring_setup ioperm iopl kcmp kexec_file_load kexec_load keyctl lookup_dcookie
mbind migrate_pages mount mount_setattr move_mount move_pages name_to_handle_at nfsservctl
open_by_handle_at open_tree perf_event_open pidfd_getfd pivot_root process_madvise ptrace
process_vm_readv process_vm_writev query_module quotactl quotactl_fd reboot request_key
set_mempolicy set_mempolicy_home_node setdomainname sethostname setns settimeofday swapoff swapon
sysfs syslog umount umount2 unshare uselib userfaultfd ustat vhangup vmsplice
""".split()  # noqa: SIM905 - shorter

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_CLONE_NEW = 0x7E020000  # of `clone`: all flags for namespaces
_MASKED_EQUAL = 7
_UNKNOWN = -1
_NEWER = range(451, 500)  # added since Linux 6.5, which the profile does not list


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


def forbid_what_docker_forbids() -> None:
    """Forbid the calls in this process and its children. It must have `no_new_privs`, or be root.

    Like the profile, it answers `clone3` with ENOSYS, so that the C library uses `clone`.

    Raises:
        OSError: the library libseccomp is missing, or the kernel refuses the filter.
    """
    name = ctypes.util.find_library("seccomp") or "libseccomp.so.2"
    library = ctypes.CDLL(name)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    for call in _FORBIDDEN:
        number = library.seccomp_syscall_resolve_name(call.encode())
        if number != _UNKNOWN:
            answer = _ERRNO | (errno.ENOSYS if call == "clone3" else errno.EPERM)
            _check(library.seccomp_rule_add_array(context, ctypes.c_uint32(answer), number, 0, None))
    for number in _NEWER:
        answer = _ERRNO | errno.EPERM
        _check(library.seccomp_rule_add_array(context, ctypes.c_uint32(answer), number, 0, None))
    clone = library.seccomp_syscall_resolve_name(b"clone")
    answer = _ERRNO | errno.EPERM
    for bit in range(32):
        if _CLONE_NEW & (1 << bit):
            flag = _Comparison(0, _MASKED_EQUAL, 1 << bit, 1 << bit)
            _check(
                library.seccomp_rule_add_array(context, ctypes.c_uint32(answer), clone, 1, ctypes.byref(flag))
            )
    _check(library.seccomp_load(context))
    library.seccomp_release(context)


def _check(result: int) -> None:
    if result != 0:
        raise OSError(-result, "libseccomp refused a rule or the filter")
