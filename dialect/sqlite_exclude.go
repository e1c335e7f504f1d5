package dialect

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"hash/fnv"
	"time"

	"github.com/gofrs/flock"

	"github.com/gormoutbox/outbox/engine"
)

const (
	excludeWait  = 5 * time.Second // long enough for the predecessor in a hot reload
	excludeRetry = 50 * time.Millisecond

	mainFileText = `SELECT file FROM pragma_database_list WHERE name = 'main'`
)

// Exclude implements engine.Exclusive by locks on files beside the database
// file, one for each message table: <file>-relay-<hash of the table's name>.
// The operating system drops them when the process ends, however it does. The
// database file itself cannot serve: closing any descriptor of it would drop
// SQLite's own locks. The files stay, empty, when the locks are released.
//
// It waits 5 seconds for the locks, then fails with engine.ErrAlreadyRunning.
// A database in memory belongs to its process, and nothing is locked.
func (s *SQLite) Exclude(ctx context.Context) (release func() error, err error) {
	file, err := s.file(ctx)
	if err != nil {
		return nil, fmt.Errorf("exclude other processes: %w", err)
	}
	var held lockFiles
	if file == "" {
		return held.release, nil
	}
	wait, cancel := context.WithTimeoutCause(ctx, s.excludeWait, engine.ErrAlreadyRunning)
	defer cancel()
	for _, t := range s.tables {
		hash := fnv.New64a()
		_, _ = hash.Write([]byte(t.table.Table))
		if err := held.add(wait, fmt.Sprintf("%s-relay-%016x", file, hash.Sum64())); err != nil {
			return nil, errors.Join(fmt.Errorf("exclude other processes: %w", err), held.release())
		}
	}
	return held.release, nil
}

// file is the path of the database file; empty for a database in memory.
func (s *SQLite) file(ctx context.Context) (string, error) {
	var file sql.NullString
	err := retryBusy(ctx, func() error { return s.db.QueryRowContext(ctx, mainFileText).Scan(&file) })
	if err != nil {
		return "", fmt.Errorf("find the database file: %w", err)
	}
	return file.String, nil
}

// lockFiles are the locks that are held.
type lockFiles []*flock.Flock

func (l *lockFiles) add(ctx context.Context, path string) error {
	lock := flock.New(path)
	if _, err := lock.TryLockContext(ctx, excludeRetry); err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return fmt.Errorf("lock %s: %w", path, err)
	}
	*l = append(*l, lock)
	return nil
}

func (l *lockFiles) release() error {
	var errs []error
	for _, lock := range *l {
		errs = append(errs, lock.Unlock())
	}
	*l = nil
	return errors.Join(errs...)
}
