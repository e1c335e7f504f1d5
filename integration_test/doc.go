// Package integration tests gormoutbox from outside, against real databases:
// whole instances on the public interface, compared with a small model of what
// they promise.
package integration
