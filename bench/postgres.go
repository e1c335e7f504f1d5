package main

import (
	"context"
	"database/sql"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"

	"github.com/gormoutbox/outbox/internal/pgserver"
)

// serverSettings keep checkpoints out of the runs, which make them themselves.
// Statements are counted only in databases that ask for it.
var serverSettings = map[string]string{
	"shared_buffers":           "512MB",
	"max_wal_size":             "8GB",
	"checkpoint_timeout":       "1h",
	"shared_preload_libraries": "pg_stat_statements",
	"pg_stat_statements.track": "none",
}

// shownSettings are printed with the figures.
var shownSettings = []string{
	"server_version", "fsync", "synchronous_commit", "full_page_writes", "wal_sync_method", "autovacuum",
	"shared_buffers", "max_wal_size", "checkpoint_timeout", "shared_preload_libraries",
}

// postgres makes a database on the server that the figures share, and returns
// its DSN.
func (b *bench) postgres(ctx context.Context, name string) (dsn string, err error) {
	if b.server == nil {
		if b.server, err = pgserver.Start(pgserver.Options{Durable: true, Settings: serverSettings}); err != nil {
			return "", err
		}
		if err := b.noteSettings(ctx); err != nil {
			return "", err
		}
	}
	return b.server.DSN(name), execute(ctx, b.server.DSN("postgres"), "CREATE DATABASE "+pgx.Identifier{name}.Sanitize())
}

func (b *bench) noteSettings(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, b.server.DSN("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	var list []string
	for _, name := range shownSettings {
		var value string
		if err := conn.QueryRow(ctx, "SELECT current_setting($1)", name).Scan(&value); err != nil {
			return err
		}
		list = append(list, name+"="+value)
	}
	b.note("PostgreSQL in %s: %s", b.server.Dir(), strings.Join(list, " "))
	return nil
}

// execute runs statements on a connection of their own.
func execute(ctx context.Context, dsn string, statements ...string) error {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	for _, s := range statements {
		if _, err := conn.Exec(ctx, s); err != nil {
			return fmt.Errorf("%s: %w", s, err)
		}
	}
	return nil
}

// poolSize is enough for eight writers, a delivery and a notification.
const poolSize = 12

// open opens a pool of its own and a GORM handle on it. Each of adjust changes
// how its connections are made.
func open(dsn string, adjust ...func(*pgx.ConnConfig)) (*gorm.DB, *sql.DB, error) {
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, nil, err
	}
	for _, fn := range adjust {
		fn(config)
	}
	pool := stdlib.OpenDB(*config)
	pool.SetMaxOpenConns(poolSize)
	pool.SetMaxIdleConns(poolSize)
	db, err := gorm.Open(postgres.New(postgres.Config{Conn: pool}), quiet())
	if err != nil {
		_ = pool.Close()
		return nil, nil, err
	}
	return db, pool, nil
}
