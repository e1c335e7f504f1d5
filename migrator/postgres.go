package migrator

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/gormoutbox/outbox/internal/tables"
)

// SQLSTATE codes.
const (
	insufficientPrivilege = "42501"
	lockNotAvailable      = "55P03"
)

// sqlState is the code of a PostgreSQL error of pgx or lib/pq, or empty.
func sqlState(err error) string {
	var coded interface{ SQLState() string }
	if errors.As(err, &coded) {
		return coded.SQLState()
	}
	return ""
}

// postgres is PostgreSQL 14 to 18.
//
// Parameters are cast wherever their type would be inferred, because the
// simple protocol sends them as literals of no type.
type postgres struct{}

// locked takes the lock in the transaction and not in the session, so that it
// ends with it on whatever occasion, also behind a pooler. The lock is of the
// schema, because its creation is part of what is to be done once.
//
// The isolation level is asked for, because the snapshot must be newer than
// the lock. A statement that waits for a lock on a live table makes everybody
// wait who comes after it, so it gives up after a second and lets them pass.
func (p postgres) locked(ctx context.Context, db *sql.DB, cfg Config, fn func(context.Context, querier) error) error {
	return retry(ctx, p.transient, func() error {
		tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
		if err != nil {
			return fmt.Errorf("begin: %w", err)
		}
		defer tx.Rollback()
		const lock = `SELECT pg_advisory_xact_lock(hashtextextended(
			'gormoutbox migrator ' || coalesce(nullif($1::text, ''), current_schema()::text, ''), 0))`
		if _, err := tx.ExecContext(ctx, lock, cfg.Schema); err != nil {
			return fmt.Errorf("lock: %w", err)
		}
		if _, err := tx.ExecContext(ctx, "SET LOCAL lock_timeout = '1s'"); err != nil {
			return fmt.Errorf("set lock_timeout: %w", err)
		}
		if err := fn(ctx, tx); err != nil {
			return err
		}
		if err := tx.Commit(); err != nil {
			return fmt.Errorf("commit: %w", err)
		}
		return nil
	})
}

func (postgres) transient(err error) bool { return sqlState(err) == lockNotAvailable }

// prepare creates the schema. IF NOT EXISTS alone would need the right to
// create schemas even where it exists.
func (postgres) prepare(ctx context.Context, q querier, cfg Config) error {
	if cfg.Schema == "" {
		return nil
	}
	var exists bool
	const query = "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = $1::text)"
	if err := q.QueryRowContext(ctx, query, cfg.Schema).Scan(&exists); err != nil {
		return fmt.Errorf("look for the schema: %w", err)
	}
	if exists {
		return nil
	}
	if _, err := q.ExecContext(ctx, createSchema(cfg)); err != nil {
		return fmt.Errorf("create schema: %w", err)
	}
	return nil
}

func createSchema(cfg Config) string {
	return "CREATE SCHEMA IF NOT EXISTS " + tables.Quote(cfg.Schema)
}

// state goes by the meta table: the message table of the same schema belongs
// to it, whatever else is on the search_path.
func (postgres) state(ctx context.Context, q querier, cfg Config) (state, error) {
	s := state{name: cfg.name()}
	const find = `SELECT n.nspname, EXISTS (
			SELECT FROM pg_catalog.pg_class t
			WHERE t.relnamespace = n.oid AND t.relname = $2::text AND t.relkind IN ('r', 'p'))
		FROM pg_catalog.pg_class m JOIN pg_catalog.pg_namespace n ON n.oid = m.relnamespace
		WHERE m.oid = to_regclass($1::text)`
	err := q.QueryRowContext(ctx, find, s.name.Meta(), s.name.Table).Scan(&s.name.Schema, &s.messages)
	if errors.Is(err, sql.ErrNoRows) {
		return s, nil
	}
	if err != nil {
		return state{}, fmt.Errorf("look for the tables: %w", err)
	}
	return s, s.readMeta(ctx, q)
}

// readMeta reads what is recorded of the tables.
func (s *state) readMeta(ctx context.Context, q querier) error {
	row := q.QueryRowContext(ctx, "SELECT coalesce(schema_version, 0), coalesce(installation, '') FROM "+s.name.Meta()+" WHERE outbox = ''")
	err := row.Scan(&s.version, &s.installation)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return fmt.Errorf("read version from %s: %w", s.name.Meta(), err)
	}
	return nil
}

func (postgres) columns(ctx context.Context, q querier, name tables.Name, table string) (map[string]column, error) {
	found := map[string]column{}
	name.Table = table
	err := collect(ctx, q, func(rows *sql.Rows) error {
		var c column
		err := rows.Scan(&c.name, &c.typ, &c.notNull)
		found[c.name] = c
		return err
	}, `SELECT attname, pg_catalog.format_type(atttypid, atttypmod), attnotnull
		FROM pg_catalog.pg_attribute
		WHERE attrelid = to_regclass($1::text) AND attnum > 0 AND NOT attisdropped`, name.Messages())
	if err != nil {
		return nil, fmt.Errorf("read columns: %w", err)
	}
	return found, nil
}

func (postgres) indexes(ctx context.Context, q querier, name tables.Name) (map[string]index, error) {
	found := map[string]index{}
	err := collect(ctx, q, func(rows *sql.Rows) error {
		var (
			name string
			i    index
		)
		err := rows.Scan(&name, &i.invalid, &i.partial, &i.columns)
		found[name] = i
		return err
	}, `SELECT c.relname, NOT (i.indisvalid AND i.indisready), i.indpred IS NOT NULL, coalesce((
			SELECT string_agg(a.attname, ', ' ORDER BY k.n)
			FROM unnest(i.indkey) WITH ORDINALITY k (attnum, n)
			JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum), '')
		FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
		WHERE i.indrelid = to_regclass($1::text)`, name.Messages())
	if err != nil {
		return nil, fmt.Errorf("read indexes: %w", err)
	}
	return found, nil
}
