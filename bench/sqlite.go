package main

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"

	"github.com/glebarez/sqlite"
	"gorm.io/gorm"

	"github.com/gormoutbox/outbox"
)

// liteDB is a database file with the tables of an instance. hand is a pool and
// a GORM handle of their own, without the instance.
type liteDB struct {
	with, without *gorm.DB
	hand          *sql.DB
	in            *outbox.Instance
	close         func() error
}

// newLite makes a file in a temporary directory, in WAL mode and with
// synchronous=NORMAL.
func newLite(ctx context.Context, o outbox.Outbox) (*liteDB, error) {
	dir, err := os.MkdirTemp("", "gormoutbox-bench-")
	if err != nil {
		return nil, err
	}
	dsn := filepath.Join(dir, "bench.db") + "?_pragma=journal_mode(WAL)&_pragma=busy_timeout(5000)&_pragma=synchronous(NORMAL)"
	l := &liteDB{close: func() error { return os.RemoveAll(dir) }}
	var pool *sql.DB
	if l.with, pool, err = openLite(dsn); err != nil {
		return nil, errors.Join(err, l.close())
	}
	l.close = func() error { return errors.Join(pool.Close(), os.RemoveAll(dir)) }
	if l.without, l.hand, err = openLite(dsn); err != nil {
		return nil, errors.Join(err, l.close())
	}
	l.close = func() error { return errors.Join(pool.Close(), l.hand.Close(), os.RemoveAll(dir)) }
	if l.in, err = install(ctx, l.with, outbox.Config{}, o); err != nil {
		return nil, errors.Join(err, l.close())
	}
	return l, nil
}

func openLite(dsn string) (*gorm.DB, *sql.DB, error) {
	pool, err := sql.Open(sqlite.DriverName, dsn)
	if err != nil {
		return nil, nil, err
	}
	pool.SetMaxOpenConns(4)
	pool.SetMaxIdleConns(4)
	db, err := gorm.Open(&sqlite.Dialector{Conn: pool}, quiet())
	if err != nil {
		return nil, nil, errors.Join(err, pool.Close())
	}
	return db, pool, nil
}

// reset empties the table and the log of the database.
func (l *liteDB) reset(ctx context.Context) error {
	for _, s := range []string{"DELETE FROM outboxer_messages", "PRAGMA wal_checkpoint(TRUNCATE)"} {
		if _, err := l.hand.ExecContext(ctx, s); err != nil {
			return err
		}
	}
	return nil
}
