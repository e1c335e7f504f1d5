package migrator_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/gormoutbox/outbox/internal/testdb"
	"github.com/gormoutbox/outbox/migrator"
)

const table = "outboxer_messages"

// fixture is a database of its own for a test.
type fixture struct {
	cfg migrator.Config
	// open opens a pool.
	open func(t *testing.T, opts ...testdb.Option) *sql.DB
	// connect opens a connection of the driver.
	connect func(context.Context) (driver.Conn, error)
	// pg is nil on SQLite.
	pg *testdb.PG
}

func onPostgres(t *testing.T) fixture {
	t.Helper()
	pg := testdb.Postgres(t)
	cfg, err := pgx.ParseConfig(pg.DSN)
	if err != nil {
		t.Fatal(err)
	}
	cfg.RuntimeParams["application_name"] = pg.Schema
	return fixture{
		cfg:     migrator.Config{Dialect: migrator.Postgres, Table: table},
		open:    func(t *testing.T, opts ...testdb.Option) *sql.DB { t.Helper(); return pg.SQL(t, opts...) },
		connect: stdlib.GetConnector(*cfg).Connect,
		pg:      pg,
	}
}

func onSQLite(t *testing.T) fixture {
	t.Helper()
	lite := testdb.SQLite(t)
	d := lite.SQL(t).Driver()
	return fixture{
		cfg:     migrator.Config{Dialect: migrator.SQLite, Table: table},
		open:    func(t *testing.T, opts ...testdb.Option) *sql.DB { t.Helper(); return lite.SQL(t, opts...) },
		connect: func(context.Context) (driver.Conn, error) { return d.Open(lite.DSN) },
	}
}

// onBoth runs a test on each database.
func onBoth(t *testing.T, test func(t *testing.T, f fixture)) {
	t.Helper()
	t.Run("postgres", func(t *testing.T) { t.Parallel(); test(t, onPostgres(t)) })
	t.Run("sqlite", func(t *testing.T) { t.Parallel(); test(t, onSQLite(t)) })
}

func newMigrator(t *testing.T, db *sql.DB, cfg migrator.Config) *migrator.Migrator {
	t.Helper()
	m, err := migrator.New(db, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func exec(t *testing.T, db *sql.DB, statements ...string) {
	t.Helper()
	for _, s := range statements {
		if _, err := db.ExecContext(t.Context(), s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

// hooked opens a pool of one connection that calls before ahead of everything
// that it sends to the database, with the text or "BEGIN" or "COMMIT". On
// PostgreSQL its application_name is the fixture's schema.
func (f fixture) hooked(t *testing.T, before func(text string)) *sql.DB {
	t.Helper()
	db := sql.OpenDB(hookedConnector{f.connect, before, f.pg == nil})
	db.SetMaxOpenConns(1)
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}

type hookedConnector struct {
	connect func(context.Context) (driver.Conn, error)
	before  func(text string)
	skips   bool
}

func (c hookedConnector) Driver() driver.Driver { return nil }

func (c hookedConnector) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.connect(ctx)
	if err != nil {
		return nil, err
	}
	return hookedConn{conn, c.before, c.skips}, nil
}

type hookedConn struct {
	driver.Conn
	before func(text string)
	// skips does always what glebarez/go-sqlite does at times: it leaves out a
	// statement whose context has ended, and reports success.
	skips bool
}

func (c hookedConn) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	c.before(text)
	if c.skips && ctx.Err() != nil {
		return driver.RowsAffected(0), nil //nolint:nilerr // that is the fault
	}
	return c.Conn.(driver.ExecerContext).ExecContext(ctx, text, args)
}

func (c hookedConn) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	c.before(text)
	return c.Conn.(driver.QueryerContext).QueryContext(ctx, text, args)
}

func (c hookedConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	c.before("BEGIN")
	tx, err := c.Conn.(driver.ConnBeginTx).BeginTx(ctx, opts)
	if err != nil {
		return nil, err
	}
	return hookedTx{tx, c.before}, nil
}

type hookedTx struct {
	driver.Tx
	before func(text string)
}

func (tx hookedTx) Commit() error {
	tx.before("COMMIT")
	return tx.Tx.Commit()
}
