package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/glebarez/sqlite"
	"go.uber.org/zap"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"
)

// poolSize bounds the connections to the database. A delivery on PostgreSQL
// holds one; at most half of them are used for that.
const poolSize = 20

// openDatabase opens PostgreSQL if there is a DSN, and else an SQLite file, and
// makes the service's own tables.
func openDatabase(dsn, file string, log *zap.Logger) (*gorm.DB, error) {
	dialector := postgres.Open(dsn)
	if dsn == "" {
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			return nil, fmt.Errorf("make the database's directory: %w", err)
		}
		dialector = sqlite.Open(file + "?_pragma=journal_mode(WAL)&_pragma=busy_timeout(5000)&_pragma=foreign_keys(1)")
	}
	db, err := gorm.Open(dialector, &gorm.Config{Logger: gormLogger(log)})
	if err != nil {
		return nil, fmt.Errorf("open the database: %w", err)
	}
	pool, err := db.DB()
	if err != nil {
		return nil, fmt.Errorf("open the database: %w", err)
	}
	pool.SetMaxOpenConns(poolSize)
	pool.SetMaxIdleConns(poolSize)
	if err := db.AutoMigrate(&Order{}); err != nil {
		return nil, errors.Join(fmt.Errorf("make the tables: %w", err), pool.Close())
	}
	return db, nil
}

// gormLogger writes what is slow or fails to log, without the values.
func gormLogger(log *zap.Logger) logger.Interface {
	return logger.New(zap.NewStdLog(log.Named("gorm")), logger.Config{
		LogLevel:                  logger.Warn,
		SlowThreshold:             time.Second,
		IgnoreRecordNotFoundError: true,
		ParameterizedQueries:      true,
	})
}

func closeDatabase(db *gorm.DB) error {
	pool, err := db.DB()
	if err != nil {
		return err
	}
	return pool.Close()
}

// defaultFile is where orders are kept if nobody says otherwise.
func defaultFile() string {
	dir, err := os.UserCacheDir()
	if err != nil {
		dir = os.TempDir()
	}
	return filepath.Join(dir, "gormoutbox-echo-app", "orders.db")
}
