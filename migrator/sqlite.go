package migrator

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"

	"github.com/gormoutbox/outbox/internal/tables"
)

// The primary result codes of SQLite that say: try again. An extended code has
// them in its low byte.
const (
	sqliteBusy   = 5
	sqliteLocked = 6
)

// sqlite is SQLite, through any database/sql driver.
type sqlite struct{}

// locked is a transaction that is a writer from its beginning. It is begun by
// hand, on one connection, because not every driver can be asked for that; one
// that began as a reader could fail to become a writer.
//
// The end of ctx is looked at between statements and not left to the driver.
// glebarez/go-sqlite leaves a statement out and reports success if the context
// ends just before it: a lost BEGIN would leave the rest without a transaction,
// a lost COMMIT the pool with a locked database.
func (s sqlite) locked(ctx context.Context, db *sql.DB, _ Config, fn func(context.Context, querier) error) error {
	return retry(ctx, s.transient, func() error {
		c, err := db.Conn(ctx)
		if err != nil {
			return fmt.Errorf("take a connection: %w", err)
		}
		defer c.Close()
		uncancelled := context.WithoutCancel(ctx)
		if _, err := c.ExecContext(uncancelled, "BEGIN IMMEDIATE"); err != nil {
			return fmt.Errorf("begin: %w", err)
		}
		err = fn(uncancelled, c)
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return errors.Join(err, rollback(uncancelled, c))
		}
		if _, err := c.ExecContext(uncancelled, "COMMIT"); err != nil {
			return errors.Join(fmt.Errorf("commit: %w", err), rollback(uncancelled, c))
		}
		return nil
	})
}

// rollback ends the transaction on c, which SQLite may have done by itself. A
// connection on which that does not work is closed, so that it does not take
// the lock with it into the pool.
func rollback(ctx context.Context, c *sql.Conn) error {
	_, err := c.ExecContext(ctx, "ROLLBACK")
	if err == nil || strings.Contains(err.Error(), "no transaction is active") {
		return nil
	}
	_ = c.Raw(func(any) error { return driver.ErrBadConn })
	return fmt.Errorf("rollback: %w", err)
}

func (sqlite) transient(err error) bool {
	var coded interface{ Code() int }
	if errors.As(err, &coded) {
		primary := coded.Code() & 0xff
		return primary == sqliteBusy || primary == sqliteLocked
	}
	text := err.Error()
	return strings.Contains(text, "database is locked") || strings.Contains(text, "table is locked")
}

func (sqlite) prepare(context.Context, querier, Config) error { return nil }

func (sqlite) state(ctx context.Context, q querier, cfg Config) (state, error) {
	s := state{name: cfg.name()}
	const find = `SELECT coalesce(max(name = ? COLLATE NOCASE), 0), coalesce(max(name = ? COLLATE NOCASE), 0)
		FROM sqlite_master WHERE type = 'table'`
	var meta bool
	err := q.QueryRowContext(ctx, find, s.name.Table, s.name.MetaName()).Scan(&s.messages, &meta)
	if err != nil {
		return state{}, fmt.Errorf("look for the tables: %w", err)
	}
	if !meta {
		return s, nil
	}
	return s, s.readMeta(ctx, q)
}

func (sqlite) columns(ctx context.Context, q querier, _ tables.Name, table string) (map[string]column, error) {
	found := map[string]column{}
	err := collect(ctx, q, func(rows *sql.Rows) error {
		var c column
		err := rows.Scan(&c.name, &c.typ, &c.notNull)
		found[c.name] = c
		return err
	}, `SELECT name, lower(type), "notnull" FROM pragma_table_info(?)`, table)
	if err != nil {
		return nil, fmt.Errorf("read columns: %w", err)
	}
	return found, nil
}

func (sqlite) indexes(ctx context.Context, q querier, name tables.Name) (map[string]index, error) {
	found := map[string]index{}
	err := collect(ctx, q, func(rows *sql.Rows) error {
		var (
			name string
			i    index
		)
		err := rows.Scan(&name, &i.partial, &i.columns)
		found[name] = i
		return err
	}, `SELECT l.name, l.partial, (
			SELECT group_concat(name, ', ') FROM (SELECT name FROM pragma_index_info(l.name) ORDER BY seqno))
		FROM pragma_index_list(?) l`, name.Table)
	if err != nil {
		return nil, fmt.Errorf("read indexes: %w", err)
	}
	return found, nil
}
