package migrator

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/gormoutbox/outbox/internal/tables"
)

// querier is a *sql.DB, a *sql.Conn or a *sql.Tx.
type querier interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// database is what differs between the databases, apart from the DDL.
type database interface {
	// state looks for the tables. It must not fail where there are none.
	state(ctx context.Context, q querier, cfg Config) (state, error)
	// locked runs fn in a transaction in which no other migrator works on the
	// same tables. fn sees what those before it have committed, and may be
	// called again after a transient error.
	locked(ctx context.Context, db *sql.DB, cfg Config, fn func(context.Context, querier) error) error
	// prepare makes what version 1 presupposes.
	prepare(ctx context.Context, q querier, cfg Config) error
	// transient tells whether it is worth trying again after err.
	transient(err error) bool
	// columns describes the columns of a table, by name.
	columns(ctx context.Context, q querier, name tables.Name, table string) (map[string]column, error)
	// indexes describes the indexes of the message table, by name.
	indexes(ctx context.Context, q querier, name tables.Name) (map[string]index, error)
}

// retry calls fn until it succeeds, fails for good, or ctx ends.
func retry(ctx context.Context, transient func(error) bool, fn func() error) error {
	const shortest, longest = 2 * time.Millisecond, 250 * time.Millisecond
	for pause := shortest; ; pause = min(2*pause, longest) {
		err := fn()
		if err == nil {
			return nil
		}
		if !transient(err) || !wait(ctx, pause/2+rand.N(pause)) {
			return blame(ctx, err)
		}
	}
}

// wait returns false if ctx ends first.
func wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// blame wraps an error after the end of ctx in that of ctx: drivers say many
// things then.
func blame(ctx context.Context, err error) error {
	ended := ctx.Err()
	if ended == nil || errors.Is(err, ended) {
		return err
	}
	return fmt.Errorf("%w: %w", ended, err)
}

// collect calls scan for each row of a query.
func collect(ctx context.Context, q querier, scan func(*sql.Rows) error, query string, args ...any) error {
	rows, err := q.QueryContext(ctx, query, args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := scan(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}
