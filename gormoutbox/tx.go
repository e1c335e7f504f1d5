package gormoutbox

import (
	"context"
	"database/sql"
	"fmt"

	"gorm.io/gorm"
)

// Tx is the transaction that a handle is in. It is safe for concurrent use as
// far as an [sql.Tx] is.
type Tx struct {
	t *transaction
}

// From returns the transaction that db is in. Nested transactions and the
// handles of model hooks are in the outer one.
//
// The errors are ErrNotInTransaction (also for a transaction that was committed
// or rolled back, or whose context has ended), with ErrDryRun if the handle is
// a dry run, ErrNotInstalled, and the error of the handle itself, which is that
// of a Begin that failed.
func From(db *gorm.DB) (*Tx, error) {
	if db == nil || db.Config == nil || db.Statement == nil {
		return nil, fmt.Errorf("%w: the handle is nil or was not opened", ErrNotInTransaction)
	}
	// First, for the connection after a failed Begin is a typed nil.
	if db.Error != nil {
		return nil, fmt.Errorf("gormoutbox: the handle has failed before: %w", db.Error)
	}
	if db.DryRun {
		return nil, fmt.Errorf("%w: %w", ErrNotInTransaction, ErrDryRun)
	}
	t, err := find(db.Statement.ConnPool)
	if err != nil {
		return nil, err
	}
	if t.hasEnded() {
		return nil, fmt.Errorf("%w: it has been committed or rolled back", ErrNotInTransaction)
	}
	if t.ctx.Err() != nil {
		return nil, fmt.Errorf("%w: it is rolled back, for its context has ended: %w", ErrNotInTransaction, context.Cause(t.ctx))
	}
	return &Tx{t}, nil
}

// find looks for the transaction under caches of statements, of which there
// can be two.
func find(conn gorm.ConnPool) (*transaction, error) {
	for {
		switch c := conn.(type) {
		case *transaction:
			if c == nil {
				return nil, fmt.Errorf("%w: it never began", ErrNotInTransaction)
			}
			return c, nil
		case *gorm.PreparedStmtTX:
			if c == nil {
				return nil, fmt.Errorf("%w: it never began", ErrNotInTransaction)
			}
			conn = c.Tx
		case gorm.TxCommitter:
			return nil, fmt.Errorf("%w: a %T: call db.Use before opening transactions, and gormoutbox.Install on the handle of db.Connection", ErrNotInstalled, conn)
		default:
			return nil, fmt.Errorf("%w: the handle is on a %T; pass the one that db.Transaction or db.Begin gave", ErrNotInTransaction, conn)
		}
	}
}

// ExecContext runs a statement in the transaction, as it is: without the
// handle's clauses, callbacks, logger and cache of statements. Placeholders are
// those of the database. Errors are the driver's.
func (tx *Tx) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	return tx.t.ExecContext(ctx, query, args...)
}

// QueryContext is ExecContext for statements that return rows, which the caller
// closes.
func (tx *Tx) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	return tx.t.QueryContext(ctx, query, args...)
}

// OnCommit has fn called once if the transaction commits: after its Commit has
// returned nil, before GORM's returns, on the same goroutine, in the order of
// the calls of OnCommit. The transaction's connection is free by then. A panic
// of fn is logged by GORM's logger, and the next function is called.
//
// It is not called if the transaction or a savepoint that was set before this
// call is rolled back, if the commit fails or its outcome is unknown, or if the
// transaction has already ended.
func (tx *Tx) OnCommit(fn func()) { tx.t.onCommit(fn) }
