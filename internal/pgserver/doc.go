// Package pgserver runs private PostgreSQL servers, and PgBouncer in front of
// them, from the programs that are installed on the machine.
//
// A server lives in a temporary directory of its own, listens on a free port of
// 127.0.0.1 and on a socket in that directory, and belongs to the process that
// started it: it ends when that process ends, however that happens, and its
// directory is removed then. Two things see to that. On Linux the kernel signals
// the server when its parent dies; everywhere a small shell waits on a pipe that
// closes with the parent, stops what still runs and removes the directory.
//
// PostgreSQL refuses to run as root, so that a root process runs it as the user
// postgres, or nobody where there is no such user.
package pgserver
