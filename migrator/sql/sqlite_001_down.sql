DROP TABLE IF EXISTS {messages};

DROP TABLE {meta};
