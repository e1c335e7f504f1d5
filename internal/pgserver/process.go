//go:build unix

package pgserver

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
)

// tailBytes is how much of a program's output goes into an error.
const tailBytes = 4096

// process is a running program and the goroutine that waits for it.
type process struct {
	pid  int
	done chan struct{} // closed when it has ended
	err  error         // how it ended; read after done
}

// launch starts cmd as the unprivileged user, such that it gets the signal when
// this process dies.
func launch(cmd *exec.Cmd, cred *syscall.Credential, onParentDeath syscall.Signal) (*process, error) {
	// A group of its own keeps the terminal's interrupt from it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: cred, Setpgid: true}
	dieWithParent(cmd.SysProcAttr, onParentDeath)
	if cmd.Env == nil {
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C"}
	}
	p := &process{done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		// The kernel takes the end of the starting thread for the end of the
		// parent, so that the thread must outlive the program.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		if err == nil {
			p.pid = cmd.Process.Pid
		}
		started <- err
		if err == nil {
			p.err = cmd.Wait()
		}
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// signal is a no-op for a program that has ended.
func (p *process) signal(sig syscall.Signal) error {
	select {
	case <-p.done:
		return nil
	default:
	}
	if err := syscall.Kill(p.pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("signal process %d: %w", p.pid, err)
	}
	return nil
}

// run runs a program to its end; its output is in the error.
func run(cmd *exec.Cmd, cred *syscall.Credential) error {
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	p, err := launch(cmd, cred, syscall.SIGKILL)
	if err != nil {
		return err
	}
	<-p.done
	if p.err != nil {
		return fmt.Errorf("%w: %s", p.err, tail(out.Bytes()))
	}
	return nil
}

// reaperScript waits for its standard input to close, stops what the pid files
// in the directory $1 name, and removes the directory. PostgreSQL gets the
// immediate shutdown, which also frees its shared memory.
const reaperScript = `
read -r _
for f in "$1"/data/postmaster.pid "$1"/bouncer.pid; do
	if [ -s "$f" ] && read -r pid <"$f"; then
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

// logTail is the end of the program's log, for an error.
func (h *home) logTail() string {
	b, err := os.ReadFile(h.path("log"))
	if err != nil {
		return err.Error()
	}
	return tail(b)
}

func tail(b []byte) string {
	b = bytes.TrimSpace(b)
	return string(b[max(0, len(b)-tailBytes):])
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

// freePort asks the kernel for a port. Somebody else may take it before it is
// used, so that callers try again.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}
