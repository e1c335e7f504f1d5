package dialect_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/gormoutbox/outbox/dialect"
	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/internal/tables"
	"github.com/gormoutbox/outbox/internal/testdb"
)

// excludeFile tells a child process which file to exclude others from.
const excludeFile = "OUTBOX_TEST_EXCLUDE_FILE"

// TestSQLiteExcludeChild is what the child process of other tests runs: it
// relays from a file, as far as anybody can tell, until its input ends.
func TestSQLiteExcludeChild(t *testing.T) {
	path := os.Getenv(excludeFile)
	if path == "" {
		t.Skip("runs in a process of its own, started by other tests")
	}
	release, err := excludingStorage(t, path, "box").Exclude(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	fmt.Println("excluded")
	_, _ = io.Copy(io.Discard, os.Stdin)
	if err := release(); err != nil {
		t.Error(err)
	}
}

// excludingStorage is a storage over the table of the file.
func excludingStorage(t *testing.T, path, table string) *dialect.SQLite {
	t.Helper()
	db := openDSN(t, path+"?_pragma=journal_mode(WAL)")
	s, err := dialect.NewSQLite(db, dialect.Config{Outboxes: map[string]tables.Name{"orders": {Table: table}}})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// excluder is a process that excludes others from a file.
type excluder struct {
	cmd   *exec.Cmd
	input io.Closer
}

func startExcluder(t *testing.T, path string) *excluder {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestSQLiteExcludeChild$")
	cmd.Env = append(os.Environ(), excludeFile+"="+path)
	input, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	output, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if line, err := bufio.NewReader(output).ReadString('\n'); line != "excluded\n" {
		t.Fatalf("the other process says %q, %v", line, err)
	}
	return &excluder{cmd, input}
}

// C68: the second process fails after a while, and gets its turn as soon as the
// first one has died, however it died.
func TestSQLiteExcludesOtherProcesses(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "app.db")
	first := startExcluder(t, path)
	second := excludingStorage(t, path, "box")
	second.SetExcludeWait(10 * time.Millisecond)
	if _, err := second.Exclude(t.Context()); !errors.Is(err, engine.ErrAlreadyRunning) {
		t.Errorf("exclude beside another process = %v, want ErrAlreadyRunning", err)
	}
	_ = first.cmd.Process.Kill()
	_ = first.cmd.Wait()
	release, err := second.Exclude(t.Context())
	if err != nil {
		t.Fatalf("exclude after the other process was killed: %v", err)
	}
	if err := release(); err != nil {
		t.Error(err)
	}
}

// C68: a process that is being replaced hands over.
func TestSQLiteExcludeWaits(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "app.db")
	first := startExcluder(t, path)
	second := excludingStorage(t, path, "box")
	second.SetExcludeWait(time.Minute)
	excluded := make(chan error, 1)
	go func() {
		release, err := second.Exclude(t.Context())
		if err == nil {
			err = release()
		}
		excluded <- err
	}()
	_ = first.input.Close()
	if err := <-excluded; err != nil {
		t.Errorf("exclude = %v", err)
	}
}

func TestSQLiteExcludeEndsWithContext(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "app.db")
	release, err := excludingStorage(t, path, "box").Exclude(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := excludingStorage(t, path, "box").Exclude(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("exclude with an ended context = %v", err)
	}
	if err := release(); err != nil {
		t.Error(err)
	}
	if err := release(); err != nil {
		t.Errorf("second release = %v", err)
	}
}

// Several instances of one process may relay from a file, each from tables of
// its own.
func TestSQLiteExcludeByTable(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "app.db")
	for _, table := range []string{"box", "Box/2", `a"b`} {
		release, err := excludingStorage(t, path, table).Exclude(t.Context())
		if err != nil {
			t.Fatalf("exclude from %s: %v", table, err)
		}
		t.Cleanup(func() { _ = release() })
	}
	both := map[string]tables.Name{"a": {Table: "free"}, "b": {Table: "box"}}
	s, err := dialect.NewSQLite(openDSN(t, path), dialect.Config{Outboxes: both})
	if err != nil {
		t.Fatal(err)
	}
	s.SetExcludeWait(time.Millisecond)
	if _, err := s.Exclude(t.Context()); !errors.Is(err, engine.ErrAlreadyRunning) {
		t.Errorf("exclude from a table that is taken = %v, want ErrAlreadyRunning", err)
	}
	// What it did get before it failed is free again.
	release, err := excludingStorage(t, path, "free").Exclude(t.Context())
	if err != nil {
		t.Fatalf("exclude from the free table: %v", err)
	}
	t.Cleanup(func() { _ = release() })
}

// The lock must not disturb SQLite's own.
func TestSQLiteExcludeLeavesDatabaseUsable(t *testing.T) {
	t.Parallel()
	file := testdb.SQLite(t)
	l := openLite(t, file.SQL(t), nil)
	release, err := l.storage.Exclude(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	l.load(t, 2, 5, func() error { return nil })
	if err := release(); err != nil {
		t.Error(err)
	}
	l.load(t, 2, 5, func() error { return nil })
}
