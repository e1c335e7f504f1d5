package gormoutbox

import (
	"context"
	"database/sql"
	"reflect"
	"runtime/debug"
	"sync"

	"gorm.io/gorm"
)

// transaction wraps what a pool began. It is the connection of every handle of
// the transaction, and keeps the functions to run after its commit.
type transaction struct {
	gorm.Tx
	pool *pool
	ctx  context.Context // it was begun with; when it ends, it is rolled back

	mu         sync.Mutex
	functions  []func()
	savepoints []savepoint // those that are set, the innermost last
	ended      bool
}

// savepoint is a name and how many functions there were when it was set.
type savepoint struct {
	name      string
	functions int
}

var (
	_ gorm.Tx             = (*transaction)(nil)
	_ gorm.GetDBConnector = (*transaction)(nil)
)

// Commit commits and runs the functions if that succeeded. They are taken out
// first: whatever comes of it, nothing can be added anymore.
func (t *transaction) Commit() error {
	functions := t.end()
	if err := t.commit(); err != nil {
		return err
	}
	for _, fn := range functions {
		t.run(fn)
	}
	return nil
}

// commit leaves no transaction open. After a COMMIT that failed, by a deferred
// constraint or a full disk, SQLite goes on with the transaction, and some
// drivers give its connection back to the pool like that: it keeps the write
// lock, and whoever gets it sees rows that were never committed, as if they
// were. So COMMIT is run as a statement, which a rollback can follow, and then
// another transaction is begun for database/sql to end.
func (t *transaction) commit() error {
	if !t.pool.staysOpen || t.ctx.Err() != nil {
		return t.Tx.Commit()
	}
	ctx := context.WithoutCancel(t.ctx)
	if _, err := t.Tx.ExecContext(ctx, "COMMIT"); err != nil {
		_ = t.Tx.Rollback() // also done, if the context has just ended
		return err
	}
	_, _ = t.Tx.ExecContext(ctx, "BEGIN")
	_ = t.Tx.Commit() // of nothing
	return nil
}

// Rollback rolls back and forgets the functions.
func (t *transaction) Rollback() error {
	t.end()
	return t.Tx.Rollback()
}

// end returns the functions to the first who calls it.
func (t *transaction) end() []func() {
	t.mu.Lock()
	defer t.mu.Unlock()
	functions := t.functions
	t.functions, t.savepoints, t.ended = nil, nil, true
	return functions
}

// run survives a panic, which must not make a commit look like a failure.
func (t *transaction) run(fn func()) {
	defer func() {
		if v := recover(); v != nil {
			t.pool.logger.Error(t.ctx, "gormoutbox: a function after the commit panicked: %v\n%s", v, debug.Stack())
		}
	}()
	fn()
}

func (t *transaction) onCommit(fn func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.ended {
		t.functions = append(t.functions, fn)
	}
}

func (t *transaction) hasEnded() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.ended
}

// GetDBConn is how gorm.DB.DB finds the *sql.DB. Like an *sql.Tx, a
// transaction that never began has none.
func (t *transaction) GetDBConn() (*sql.DB, error) {
	if t == nil {
		return nil, gorm.ErrInvalidDB
	}
	return database(t.Tx)
}

// The four ways to run SQL, through which savepoints are followed.

func (t *transaction) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	result, err := t.Tx.ExecContext(ctx, query, args...)
	if err == nil {
		t.follow(query)
	}
	return result, err
}

func (t *transaction) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	rows, err := t.Tx.QueryContext(ctx, query, args...)
	if err == nil {
		t.follow(query)
	}
	return rows, err
}

func (t *transaction) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	row := t.Tx.QueryRowContext(ctx, query, args...)
	if row.Err() == nil {
		t.follow(query)
	}
	return row
}

// StmtContext is what GORM's cache runs a statement with: at once, every time,
// and out of our sight, so that success is assumed. The cache is older than the
// transaction; what it prepared cannot be known from PrepareContext.
func (t *transaction) StmtContext(ctx context.Context, stmt *sql.Stmt) *sql.Stmt {
	if ctx.Err() == nil {
		t.follow(reflect.ValueOf(stmt).Elem().FieldByName("query").String())
	}
	return t.Tx.StmtContext(ctx, stmt)
}

// follow does to the list of functions what a statement that was run does to
// the transaction.
func (t *transaction) follow(query string) {
	c := parseControl(query)
	if c.verb == otherStatement {
		return
	}
	if c.verb == endTransaction {
		t.end()
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	name := c.key(t.pool.exactNames)
	if c.verb == setSavepoint {
		t.savepoints = append(t.savepoints, savepoint{name, len(t.functions)})
		return
	}
	i := len(t.savepoints) - 1
	for i >= 0 && t.savepoints[i].name != name {
		i--
	}
	switch {
	case i < 0: // the database says so too, or there is nothing to undo
	case c.verb == releaseSavepoint:
		t.savepoints = t.savepoints[:i]
	case c.verb == rollbackToSavepoint:
		keep := t.savepoints[i].functions
		clear(t.functions[keep:])
		t.functions = t.functions[:keep]
		t.savepoints = t.savepoints[:i+1]
	}
}
