package dialect

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// The primary result codes of SQLite that say: try again. An extended code
// (SQLITE_BUSY_SNAPSHOT, SQLITE_LOCKED_SHAREDCACHE) has them in its low byte.
const (
	sqliteBusy   = 5
	sqliteLocked = 6
)

// isBusy tells whether an error of any SQLite driver says that another
// connection was in the way.
func isBusy(err error) bool {
	var coded interface{ Code() int }
	if errors.As(err, &coded) {
		primary := coded.Code() & 0xff
		return primary == sqliteBusy || primary == sqliteLocked
	}
	text := err.Error()
	return strings.Contains(text, "database is locked") || strings.Contains(text, "table is locked")
}

// retryBusy calls fn until it succeeds, fails for another reason than a busy
// database, or ctx ends. SQLite has waited for busy_timeout before it says
// busy, except where waiting would have been in vain, so the pauses are short.
func retryBusy(ctx context.Context, fn func() error) error {
	const shortest, longest = time.Millisecond, 50 * time.Millisecond
	for pause := shortest; ; pause = min(2*pause, longest) {
		err := fn()
		if err == nil || !isBusy(err) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w while %w", ctx.Err(), err)
		case <-time.After(pause/2 + rand.N(pause)):
		}
	}
}

// exec runs one writing statement, which needs no transaction around it.
func (s *SQLite) exec(ctx context.Context, query string, args ...any) (result sql.Result, err error) {
	err = s.conn(ctx, func(ctx context.Context, c *sql.Conn) error {
		result, err = c.ExecContext(ctx, query, args...)
		return err
	})
	return result, err
}

// write runs fn in a transaction of its own that is a writer from its first
// statement on. One that began as a reader could not become a writer once
// somebody else has written, however long it waited (SQLITE_BUSY_SNAPSHOT).
// BEGIN IMMEDIATE is said here and not left to the driver's options, which not
// every application sets and not every driver honours in all combinations.
//
// fn may be called several times. It must use c alone: the pool may have no
// second connection. If ctx has ended when it returns, nothing is committed.
func (s *SQLite) write(ctx context.Context, fn func(c *sql.Conn) error) error {
	return s.conn(ctx, func(whole context.Context, c *sql.Conn) error {
		if _, err := c.ExecContext(whole, "BEGIN IMMEDIATE"); err != nil {
			return fmt.Errorf("begin: %w", err)
		}
		err := fn(c)
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return errors.Join(err, rollback(whole, c))
		}
		if _, err := c.ExecContext(whole, "COMMIT"); err != nil {
			return errors.Join(fmt.Errorf("commit: %w", err), rollback(whole, c))
		}
		return nil
	})
}

// conn runs fn on a connection, again and again while the database is busy and
// ctx has not ended. The context that it hands on does not end: statements that
// write are short, and a driver may leave one out and report success if its
// context ends just before it (glebarez/go-sqlite does), or leave it unknown
// whether one that it interrupted has taken effect.
func (s *SQLite) conn(ctx context.Context, fn func(ctx context.Context, c *sql.Conn) error) error {
	return retryBusy(ctx, func() error {
		c, err := s.db.Conn(ctx)
		if err != nil {
			return fmt.Errorf("take a connection: %w", err)
		}
		defer c.Close()
		return fn(context.WithoutCancel(ctx), c)
	})
}

// rollback ends the transaction on c, which SQLite may have done by itself.
// A connection on which that does not work is closed, so that it does not go
// back to the pool with the write lock.
func rollback(ctx context.Context, c *sql.Conn) error {
	_, err := c.ExecContext(ctx, "ROLLBACK")
	if err == nil || strings.Contains(err.Error(), "no transaction is active") {
		return nil
	}
	_ = c.Raw(func(any) error { return driver.ErrBadConn })
	return fmt.Errorf("rollback: %w", err)
}
