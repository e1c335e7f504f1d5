package testdb

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"maps"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
)

// adminTimeout bounds making and dropping a schema. A test that left a
// transaction open fails by it.
const adminTimeout = 20 * time.Second

// PG is a schema of its own for one test.
type PG struct {
	// DSN is a URL under which unqualified names resolve to Schema and nowhere
	// else.
	DSN string
	// Direct is the same without a pooler between: DSN, unless the database
	// is behind PgBouncer.
	Direct string
	// Schema is where everything of the test belongs.
	Schema string
}

// Postgres makes a schema in the shared server, which is dropped when the test
// ends, after the handles that it opened are closed. The DSN sets search_path
// by a startup parameter.
func Postgres(t testing.TB) *PG {
	t.Helper()
	server, err := shared.serverURL()
	need(t, "PostgreSQL", err)
	schema := uniqueName(t)
	admin(t, server.String(), "CREATE SCHEMA "+schema)
	t.Cleanup(func() { admin(t, server.String(), "DROP SCHEMA "+schema+" CASCADE") })
	dsn := withParam(server, "search_path", schema)
	return &PG{DSN: dsn, Direct: dsn, Schema: schema}
}

// PgBouncer makes a database in the shared server, to be reached through
// PgBouncer in transaction pooling.
//
// A client of PgBouncer cannot set search_path when it connects: the parameter
// is not tracked, so that it is refused or, worse, ignored. That is why the
// test gets a database, with search_path as the database's own setting, which
// holds for every connection whoever opens it. Prepared statements do not
// survive a change of the server connection: open handles with ExecMode, for
// example pgx.QueryExecModeExec.
func PgBouncer(t testing.TB) *PG {
	t.Helper()
	server, err := shared.serverURL()
	need(t, "PostgreSQL", err)
	pooler, err := shared.poolerURL()
	need(t, "PgBouncer", err)
	name := uniqueName(t)
	admin(t, server.String(), "CREATE DATABASE "+name)
	// Forced, because PgBouncer keeps connections to it.
	t.Cleanup(func() { admin(t, server.String(), "DROP DATABASE "+name+" WITH (FORCE)") })
	direct := withDatabase(server, name)
	admin(t, direct, "CREATE SCHEMA "+name, "ALTER DATABASE "+name+" SET search_path = "+name)
	return &PG{DSN: withDatabase(pooler, name), Direct: direct, Schema: name}
}

// Gorm opens a pool of its own, closed when the test ends, and a handle on it.
func (p *PG) Gorm(t testing.TB, opts ...Option) *gorm.DB {
	t.Helper()
	o := newOptions(opts)
	db, err := gorm.Open(postgres.New(postgres.Config{Conn: p.open(t, o)}), o.gormConfig())
	if err != nil {
		t.Fatalf("open gorm: %v", err)
	}
	return db
}

// SQL opens a pool of its own, closed when the test ends.
func (p *PG) SQL(t testing.TB, opts ...Option) *sql.DB {
	t.Helper()
	return p.open(t, newOptions(opts))
}

func (p *PG) open(t testing.TB, o options) *sql.DB {
	t.Helper()
	cfg, err := pgx.ParseConfig(p.DSN)
	if err != nil {
		t.Fatalf("parse %s: %v", p.DSN, err)
	}
	if o.execMode != nil {
		cfg.DefaultQueryExecMode = *o.execMode
	}
	maps.Copy(cfg.RuntimeParams, o.params)
	db := stdlib.OpenDB(*cfg)
	db.SetMaxOpenConns(o.poolSize)
	db.SetMaxIdleConns(o.poolSize)
	closeAtEnd(t, db)
	return db
}

// Conn opens a connection, closed when the test ends.
func (p *PG) Conn(t testing.TB) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), p.DSN)
	if err != nil {
		t.Fatalf("connect: %v", err)
	}
	t.Cleanup(func() {
		if err := conn.Close(context.Background()); err != nil {
			t.Errorf("close connection: %v", err)
		}
	})
	return conn
}

// admin runs statements on a connection of its own.
func admin(t testing.TB, dsn string, statements ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), adminTimeout)
	defer cancel()
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		t.Fatalf("connect: %v", err)
	}
	defer conn.Close(context.Background())
	for _, s := range statements {
		if _, err := conn.Exec(ctx, s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

// uniqueName tells which test it is for, and needs no quotes.
func uniqueName(t testing.TB) string {
	const longest = 40
	clean := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, strings.ToLower(t.Name()))
	random := make([]byte, 6)
	_, _ = rand.Read(random) // never fails
	return clean[:min(len(clean), longest)] + "_" + hex.EncodeToString(random)
}

func withParam(u *url.URL, key, value string) string {
	c := *u
	q := c.Query()
	q.Set(key, value)
	c.RawQuery = q.Encode()
	return c.String()
}

func withDatabase(u *url.URL, name string) string {
	c := *u
	c.Path = "/" + name
	return c.String()
}
