package dialect

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
)

// pgStatement is a statement and what to do with its rows, if it has any.
type pgStatement struct {
	sql  string
	args []any
	read func(rows pgRows) error
}

// pgRows is what pgx.Rows and *sql.Rows share.
type pgRows interface {
	Next() bool
	Scan(dest ...any) error
	Err() error
}

// pgWire is one connection for the duration of a claim. After an error it must
// not be used again, and is closed.
type pgWire interface {
	// send runs the statements one after the other until one fails.
	send(ctx context.Context, statements []pgStatement) error
	// ping asks the server whether the transaction lives, while the claim
	// waits for its relay. Concurrent calls are fine.
	ping(ctx context.Context) error
	// watch calls lost when the server ends the connection, until stop.
	watch(lost func()) (stop func())
}

// errDiscard makes database/sql throw a connection away.
var errDiscard = driver.ErrBadConn

// withWire runs fn on one connection of the pool. Unless fn says that it left
// the connection clean, with no transaction open, it is closed: whatever state
// it is in, the server then rolls back and lets go of the locks.
func (p *Postgres) withWire(ctx context.Context, fn func(pgWire) (clean bool, err error)) error {
	conn, err := p.db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close() // gives it back, or does nothing if it was thrown away
	plain := false
	raw := conn.Raw(func(dc any) error {
		native, ok := dc.(*stdlib.Conn)
		if plain = !ok; plain {
			return nil
		}
		var clean bool
		if clean, err = fn(&pgxWire{conn: native.Conn()}); !clean {
			return errDiscard
		}
		return nil
	})
	if plain {
		return withPlainWire(conn, fn)
	}
	if err == nil && !errors.Is(raw, errDiscard) {
		err = raw
	}
	return err
}

// withPlainWire is withWire over a driver other than pgx, or one that is
// wrapped by another.
func withPlainWire(conn *sql.Conn, fn func(pgWire) (clean bool, err error)) (err error) {
	clean := false
	defer func() {
		if !clean {
			_ = conn.Raw(func(any) error { return errDiscard })
		}
	}()
	clean, err = fn(&plainWire{conn: conn})
	return err
}

// pgxWire sends all statements in one packet.
type pgxWire struct {
	conn *pgx.Conn
}

func (w *pgxWire) send(ctx context.Context, statements []pgStatement) error {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	var batch pgx.Batch
	for _, s := range statements {
		batch.Queue(s.sql, s.args...)
	}
	results := w.conn.SendBatch(ctx, &batch)
	for _, s := range statements {
		if err := readResult(results, s); err != nil {
			_ = results.Close()
			return err
		}
	}
	return results.Close()
}

func readResult(results pgx.BatchResults, s pgStatement) error {
	if s.read == nil {
		_, err := results.Exec()
		return err
	}
	rows, err := results.Query()
	if err != nil {
		return err
	}
	defer rows.Close()
	return s.read(rows)
}

// ping has nothing to ask: watch notices the end of the connection at once.
func (w *pgxWire) ping(context.Context) error { return nil }

// watch reads from the connection, on which nothing arrives while the server
// waits for the client, except its end.
func (w *pgxWire) watch(lost func()) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			_, err := w.conn.WaitForNotification(ctx)
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				lost()
				return
			}
		}
	}()
	return func() {
		cancel()
		<-ended
	}
}

// plainWire sends one statement after the other through database/sql.
type plainWire struct {
	mu   sync.Mutex
	conn *sql.Conn
}

func (w *plainWire) send(ctx context.Context, statements []pgStatement) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	for _, s := range statements {
		if err := w.run(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

func (w *plainWire) run(ctx context.Context, s pgStatement) error {
	if s.read == nil {
		_, err := w.conn.ExecContext(ctx, s.sql, s.args...)
		return err
	}
	rows, err := w.conn.QueryContext(ctx, s.sql, s.args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	if err := s.read(rows); err != nil {
		return err
	}
	return rows.Err()
}

func (w *plainWire) ping(ctx context.Context) error {
	return w.send(ctx, []pgStatement{{sql: "SELECT 1"}})
}

// pingEvery is how often a plain connection is asked whether it lives.
const pingEvery = 500 * time.Millisecond

// watch asks the server now and then, having no way to be told.
func (w *plainWire) watch(lost func()) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(pingEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if err := w.ping(ctx); err != nil && ctx.Err() == nil {
				lost()
				return
			}
		}
	}()
	return func() {
		cancel()
		<-ended
	}
}
