package pgserver

import "syscall"

// dieWithParent makes the kernel send sig when the starting thread ends.
func dieWithParent(attr *syscall.SysProcAttr, sig syscall.Signal) { attr.Pdeathsig = sig }
