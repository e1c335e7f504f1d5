//go:build unix

package pgserver

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

// reaperScript waits for its standard input to close, stops what the pid files
// in the directory $1 name, and removes the directory. PostgreSQL gets the
// immediate shutdown, which also frees its shared memory; a negative number is
// the single process of an initdb.
const reaperScript = `
read -r _
for f in "$1"/data/postmaster.pid "$1"/bouncer.pid; do
	if [ -s "$f" ] && read -r pid <"$f"; then
		pid=${pid#-}
		kill -QUIT "$pid"
		while kill -0 "$pid"; do sleep 0.05; done
	fi
done 2>/dev/null
cd / && rm -rf "$1"
`

// home is the directory of a server and the reaper that removes it.
type home struct {
	dir    string
	cred   *syscall.Credential
	reaper *process
	pipe   io.Closer // the reaper works when it closes
}

func newHome(prefix string) (*home, error) {
	cred, err := unprivileged()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", prefix)
	if err != nil {
		return nil, err
	}
	if cred != nil {
		err = os.Chown(dir, int(cred.Uid), int(cred.Gid))
	}
	h := &home{dir: dir, cred: cred}
	if err == nil {
		err = h.startReaper()
	}
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return h, nil
}

func (h *home) startReaper() error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	cmd := exec.Command("/bin/sh", "-c", reaperScript, "sh", h.dir)
	cmd.Stdin = r
	h.reaper, err = launch(cmd, h.cred, 0)
	_ = r.Close() // the child has its own
	if err != nil {
		_ = w.Close()
		return fmt.Errorf("start reaper: %w", err)
	}
	h.pipe = w
	return nil
}

// close removes the directory. The caller has ended what ran in it.
func (h *home) close() error {
	for _, name := range []string{"data/postmaster.pid", "bouncer.pid"} {
		_ = os.Remove(h.path(name)) // one that was killed leaves it, and the number may be another's by now
	}
	_ = h.pipe.Close()
	<-h.reaper.done
	if h.reaper.err != nil {
		return fmt.Errorf("remove %s: %w", h.dir, h.reaper.err)
	}
	return nil
}

func (h *home) path(elem string) string { return filepath.Join(h.dir, elem) }

// serve starts a program whose output goes to the file log, and returns once
// dsn accepts connections. The stop signal is what it also gets if this process
// dies.
func (h *home) serve(dsn string, stop syscall.Signal, name string, args ...string) (*process, error) {
	log, err := os.OpenFile(h.path("log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(name, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = h.dir, log, log
	p, err := launch(cmd, h.cred, stop)
	if err != nil {
		return nil, err
	}
	if err := p.waitReady(dsn); err != nil {
		err = errors.Join(err, p.end(stop))
		out, _ := os.ReadFile(log.Name())
		return nil, fmt.Errorf("%w\n%s", err, tail(out))
	}
	return p, nil
}

// unprivileged is the user to run programs as: nil for the current one.
func unprivileged() (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	var missing []error
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			missing = append(missing, err)
			continue
		}
		uid, err := strconv.ParseUint(u.Uid, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("user %s: %w", name, err)
		}
		gid, err := strconv.ParseUint(u.Gid, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("user %s: %w", name, err)
		}
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
	}
	return nil, fmt.Errorf("root needs another user to run the server as: %w", errors.Join(missing...))
}
