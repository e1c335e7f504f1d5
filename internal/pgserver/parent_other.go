//go:build unix && !linux

package pgserver

import "syscall"

// dieWithParent does nothing where the kernel has no such signal: the reaper
// alone ends the program.
func dieWithParent(*syscall.SysProcAttr, syscall.Signal) {}
